"""Engine, scheduler, runner, sampling, generation."""
