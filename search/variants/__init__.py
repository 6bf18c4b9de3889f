"""What a study asks for and what that became: `Asked`, `Variant`, and what a section may ask of both."""
