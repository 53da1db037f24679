"""Files that survive a power cut, and messages between processes."""
