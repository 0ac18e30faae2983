"""Run the models of other libraries on the ops of this package. Ops, kernels and layers import
nothing from here."""
