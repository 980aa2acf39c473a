"""The front's parts: who is there, what is on its way, who lends what to whom."""
