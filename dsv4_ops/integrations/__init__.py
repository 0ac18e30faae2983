"""Run the models of other libraries on the ops of this package. Only the CLI imports from here."""
