"""TOL, operator and launcher: decides what a run does next, and does it."""
