"""What is true of a job from the moment on in which somebody takes it over."""
