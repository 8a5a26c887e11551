"""Graph passes: capture, recognise, rewrite, check, print."""
