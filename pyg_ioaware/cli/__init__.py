"""The commands of ``python -m pyg_ioaware``."""
