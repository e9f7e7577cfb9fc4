"""An incident as text and as files, and its replay."""
