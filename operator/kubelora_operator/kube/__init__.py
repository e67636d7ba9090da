"""Access to the API server: the client, leader election and the RBAC permissions for both."""
