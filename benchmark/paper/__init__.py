"""Tables, figures and pages made from the results of finished runs."""
