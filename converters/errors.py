"""The error that a user can act on."""


class UserError(Exception):
    """Bad input: one clear sentence that says what is wrong, where, and what to do.

    A command prints it without a traceback and ends with exit code 2. The `details` stand below it as they are: the
    end of a log, the input that something failed on.
    """

    def __init__(self, sentence: str, details: str = "") -> None:
        super().__init__(sentence, details) if details else super().__init__(sentence)
        self.sentence, self.details = sentence, details

    def __str__(self) -> str:
        return f"{self.sentence}\n{self.details}" if self.details else self.sentence
