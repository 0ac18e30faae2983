"""Which implementation runs a call (``impl=``), and why not another."""
