def solve(session):
    return 1.0
