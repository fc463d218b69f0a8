"""Views: a graph or a plan as text, figure, page or trace."""
