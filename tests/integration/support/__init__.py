"""What the integration tests share: waiting, processes, small models, datums, plain HTTP.

Nothing here fakes a part of Tandem; the tests drive the real stack with the real SDK.
"""
