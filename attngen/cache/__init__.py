"""What takes time to make and is kept on disk."""
