"""What makes the site of the documentation out of ``docs/`` and the code; none of it is on the site."""
