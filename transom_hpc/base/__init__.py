"""The ground floor: what every other part may use. Standard library only."""
