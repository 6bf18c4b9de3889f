"""Where text comes from: files, the standard library, records, the hub, mixtures, generated tasks."""
