"""What PPO is compared with: other algorithms, other implementations."""
