"""The daemon against the real Choria: its broker and its servers. Run by ``make interop``."""
