"""Questions and passages to work with: public data sets by name, invented worlds."""
