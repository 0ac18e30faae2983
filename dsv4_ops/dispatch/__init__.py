"""Select the implementation that runs a call (``impl=``), and explain the selection."""
