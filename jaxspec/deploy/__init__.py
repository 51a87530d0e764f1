"""Many replicas of the engine behind one address, on Ray Serve. Modules that import Ray say so in their first line."""
