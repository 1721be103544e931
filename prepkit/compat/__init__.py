"""The faces of other libraries over prepkit's own calls, for scripts that are to run as they are."""
