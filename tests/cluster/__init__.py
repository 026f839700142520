"""Tandem on a real cluster, `make test-cluster`: objects, the launcher of pods, the whole stack.

The environment describes the cluster:

    KUBECONFIG                   an administrator's, for Kubernetes 1.34 or newer
    TANDEM_TEST_BINARIES         instead: a folder with `kind`, or with `etcd` and `kube-apiserver`,
                                 which are started and stopped. Without both, all tests are skipped
    TANDEM_TEST_ARTEFACTS        a folder for logs, events and descriptions of pods. Without it,
                                 runs/cluster-DATE
    TANDEM_TEST_IMAGE            an image with Python, for idle workers
    TANDEM_TEST_GATEWAY_IMAGE    the images of the stack
    TANDEM_TEST_TRAINER_IMAGE
    TANDEM_TEST_SAMPLER_IMAGE
    TANDEM_TEST_POSTGRES_IMAGE
    TANDEM_TEST_DEVICE_CLASS     a DeviceClass of which two nodes have four devices each
    TANDEM_TEST_COMPUTE          "gpu" for NVIDIA devices, "cpu" for substitutes
    TANDEM_TEST_STORAGE_CLASS    a class for ReadWriteMany. On a cluster with one node, the
                                 default class works too
    TANDEM_TEST_SHARED_FOLDER    instead of a class: a folder that all nodes mount
    TANDEM_TEST_LOSE_NODE        commands that switch the node `{node}` off and on. Without
    TANDEM_TEST_RETURN_NODE      them, the test of a lost node is skipped

The tests make their own namespaces. At the end they delete these namespaces and all objects outside
them."""
