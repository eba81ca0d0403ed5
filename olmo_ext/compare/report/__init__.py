"""The comparison as one HTML file that needs no network."""
