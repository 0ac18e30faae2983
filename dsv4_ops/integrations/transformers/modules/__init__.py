"""What ``patch`` changes of modules: forwards, weights in other layouts, and what is checked."""
