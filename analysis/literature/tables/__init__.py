"""Tables of published figures, each kind recognised by its columns."""
