"""What a sweep's table says: its points as plans in settings, who is fastest among them, and what it costs."""
