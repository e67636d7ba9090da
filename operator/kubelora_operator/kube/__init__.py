"""Access to the API server: the client, leader election and the permissions both need."""
