"""What eight workers ask of a slow source, and how long they take."""
