"""Several engines behind one server: Ray Serve runs them, and streams survive their death."""
