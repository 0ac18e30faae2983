"""Changes of modules: forwards, weights in other layouts, and checks."""
