"""Inductor lowerings, loaded the first time a compiler traces an op of ours (see
``dispatch/define.py``)."""
