"""The output folder of a run: which paths it must not contain, who may write there, and how exports are replaced."""
