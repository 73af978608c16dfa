"""Row caches: traces of Criteo's shape, and a simulator that shares no code with the cache of the workers."""
