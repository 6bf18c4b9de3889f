"""The pages of the dashboard: the studies, and one study."""
