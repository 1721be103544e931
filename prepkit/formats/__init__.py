"""Config files of prepkit and of others: read by ``importers``, written and read back by ``exporters``."""
