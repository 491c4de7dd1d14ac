"""The asyncio daemon: owns every request, its workers, its interfaces. Never imports torch."""
