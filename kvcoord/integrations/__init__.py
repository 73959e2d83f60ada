"""Engines: each folder makes one of them agree through kvcoord. Imported by that engine, never by kvcoord itself."""
