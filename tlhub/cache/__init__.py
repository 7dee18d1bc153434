"""The cache: keys of what is built, entries that hold it, stores that hold entries, and their upkeep.

A lookup goes ``chain`` -> ``store`` -> ``entry`` -> ``key``; nothing here knows how anything is compiled.
"""
