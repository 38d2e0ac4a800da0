"""What a tuning job shows: its progress, and the page on it."""
