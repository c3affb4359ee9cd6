"""The site in docs/."""
