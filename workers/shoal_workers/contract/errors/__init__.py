"""What an exception of a worker says about its cause: the class of its text (`texts`), and whose code raised it
(`classes`).

Pure: the standard library only. The worker classifies its own exception and reports the class with its exit; the
attempt machine combines the classes of all ranks (`shoal_service.core.attempt.faults.raised_errors`).
"""
