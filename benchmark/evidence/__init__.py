"""Our evidence: what we run, and the tables, figures, pages and site made from it."""
