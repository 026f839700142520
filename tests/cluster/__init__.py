"""Tandem on a real cluster, `make test-cluster`: the launcher of pods, and the whole stack.

The environment says which cluster, and what of it may be used:

    KUBECONFIG                   which cluster; an administrator's, 1.34 or newer. Nothing is
                                 tested without it
    TANDEM_TEST_IMAGE            an image with Python, for workers that do nothing
    TANDEM_TEST_GATEWAY_IMAGE    the images of the stack, which the nodes have or can pull
    TANDEM_TEST_TRAINER_IMAGE
    TANDEM_TEST_SAMPLER_IMAGE
    TANDEM_TEST_POSTGRES_IMAGE
    TANDEM_TEST_DEVICE_CLASS     a DeviceClass of which two nodes have four devices each
    TANDEM_TEST_COMPUTE          "gpu" if these are NVIDIA's; "cpu" if they stand for some
    TANDEM_TEST_STORAGE_CLASS    one for ReadWriteMany. On a cluster with one node, the default
                                 class will do
    TANDEM_TEST_SHARED_FOLDER    instead of it: a folder that all nodes have in common
    TANDEM_TEST_LOSE_NODE        commands by which a node is lost, and is back: `{node}` is its
    TANDEM_TEST_RETURN_NODE      name. Without them that test is skipped

All is done in namespaces that are made for it, and deleted at the end with all that was made
outside of them.
"""
