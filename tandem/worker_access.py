from tandem.worker_server import SecretInterceptor

__all__ = ["SecretInterceptor"]
