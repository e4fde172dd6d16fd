"""The request path: which worker gets a request, and what happens when that one fails."""
