"""What router and workers say to each other, and the sockets that carry it."""
