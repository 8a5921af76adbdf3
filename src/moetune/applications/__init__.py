"""What a user can ask for; network, NVML and environment variables enter here."""
