"""Commands for runs and copies of your own."""
