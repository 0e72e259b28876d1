"""Reaching the hosts, starting processes there, and the network between them: ssh, horovodrun, mpirun, Gloo, NCCL."""

from __future__ import annotations

from hvdtrain.diagnosis.models import Rule

SSH = (
    Rule(
        "ssh-key-changed",
        "has changed and you have requested strict checking",
        r"Host key for (?P<host>\S+) has changed and you have requested strict checking",
        "the host key of {host} isn't the one that known_hosts has: the machine was installed anew, or it is another",
        "if that is expected: ssh-keygen -R {host}, connect once with ssh {host} and compare the fingerprint",
        "setup",
    ),
    Rule(
        "ssh-key-unknown",
        "host key is known for",
        r"No \S+ host key is known for (?P<host>\S+) and you have requested strict checking",
        "ssh doesn't know the host key of {host}",
        "connect once with ssh {host} and accept its fingerprint, or add its key to known_hosts",
        "setup",
    ),
    Rule(
        "ssh-key",
        "Host key verification failed",
        r"Host key verification failed",
        "ssh refused a host because its host key is unknown or has changed",
        "ssh to each host once by hand, as the user who launches, and compare the fingerprint",
        "setup",
    ),
    Rule(
        "ssh-key-file",
        ("UNPROTECTED PRIVATE KEY FILE", "Bad owner or permissions on"),
        r"Permissions (?P<mode>\d+) for '(?P<file>[^']+)' are too open|Bad owner or permissions on (?P<config>\S+)",
        "ssh doesn't use its key or its configuration, as others may read or write the file",
        "chmod 600 that file, and chmod 700 ~/.ssh",
        "setup",
    ),
    Rule(
        "ssh-permission",
        "Permission denied (",
        r"(?:^|(?P<login>[\w.-]+@(?P<host>[\w.:%-]+)): )Permission denied \((?P<methods>[a-z,-]*(?:publickey|"
        r"password)[a-z,-]*)\)",
        "the ssh login was refused: {login} (ways in that the host offers: {methods})",
        "ssh-copy-id USER@HOST, or ssh.user and ssh.identity_file in the job; the key's passphrase must be in an "
        "ssh-agent",
        "setup",
    ),
    Rule(
        "ssh-unknown-host",
        ("Could not resolve hostname", "Name or service not known", "Temporary failure in name resolution"),
        r"ssh: Could not resolve hostname (?P<host>\S+?): (?P<why>.*)",
        "the name of the host {host} isn't known on this machine ({why})",
        "correct it in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config",
        "setup",
    ),
    Rule(
        "ssh-refused",
        "Connection refused",
        r"ssh: connect to host (?P<host>\S+) port (?P<port>\d+): Connection refused",
        "nothing answers ssh on {host}, port {port}: the ssh server doesn't run there, or listens on another port",
        "start sshd on {host} (systemctl start ssh), or give its port with ssh.port in the job",
        "setup",
    ),
    Rule(
        "ssh-unreachable",
        ("ssh: connect to host", "timed out"),
        r"ssh: connect to host (?P<host>\S+) port (?P<port>\d+): (?P<why>Connection timed out|Operation timed out|"
        r"No route to host|Network is unreachable)|^Connection to (?P<other>\S+) port \d+ (?P<late>timed out)",
        "{host}{other} can't be reached over the network: {why}{late}",
        "ping {host}{other}; is it switched on, is the address right, does a firewall drop the port of ssh?",
        "lost_host",
    ),
    Rule(
        "ssh-too-many",
        ("kex_exchange_identification", "ssh_exchange_identification", "Too many authentication failures"),
        r"(?:kex|ssh)_exchange_identification: (?P<why>.*)|Too many authentication failures",
        "the ssh server ended the connection before the login: {why}",
        "raise MaxStartups (say 100:30:200) in the hosts' sshd_config; with many keys in the agent use "
        "IdentitiesOnly=yes",
        "setup",
    ),
    Rule(
        "ssh-missing",
        ("ssh: command not found", "plm_rsh_agent", "agent for starting remote"),
        r"ssh: (?:command )?not found|The value of the MCA parameter \"plm_rsh_agent\" was set to a path\s+that "
        r"could not be found",
        "this machine has no ssh client",
        "install it (Debian: openssh-client), also in the container's image",
        "setup",
    ),
)

START = (
    Rule(
        "orted-missing",
        "orted",
        r"orted: (?:command not found|No such file or directory|not found)",
        "Open MPI isn't found on a host: its orted is not on the PATH of a login without a terminal",
        "install the same Open MPI at the same path on every host, or start mpirun by its absolute path (or --prefix)",
        "setup",
    ),
    Rule(
        "not-enough-slots",
        "not enough slots available",
        r"There are not enough slots available in the system to satisfy the (?P<slots>\d+)\s+slots",
        "{slots} processes were asked for, and the hosts have fewer slots",
        "give more slots in the hostfile (name slots=N) or fewer processes; beyond the cores: mpirun --oversubscribe",
        "setup",
    ),
    Rule(
        "more-processes-than-slots",
        "equested more processes",
        r"[Rr]equested more processes \((?P<wanted>\d+)\) than there are available slots \((?P<slots>\d+)\)",
        "{wanted} processes were asked for, and the hosts have {slots} slots",
        "give more slots in the hostfile (name slots=N) or fewer processes",
        "setup",
    ),
    Rule(
        "run-as-root",
        "attempt to run as root",
        r"(?:mpirun|mpiexec|prterun|orterun) has detected an attempt to run as root",
        "mpirun doesn't run as root without being told to",
        "run as another user, or (in a container) mpirun --allow-run-as-root, or OMPI_ALLOW_RUN_AS_ROOT=1 and "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        "setup",
    ),
    Rule(
        "mpirun-missing",
        ("mpirun", "MPI implementation"),
        r"(?:mpirun: (?:command )?not found|Open MPI/Spectrum MPI/MPICH is not found|horovod does not find an "
        r"installed MPI|"
        r"Unknown MPI implementation given in output of mpirun)",
        "no mpirun that Horovod knows is on the PATH",
        "install Open MPI (Debian: openmpi-bin), or controller: gloo",
        "setup",
    ),
    Rule(
        "program-missing",
        "Executable:",
        r"(?:unable to find the specified executable|could not access\s+or execute an executable)"
        r"(?=[\s\S]{0,600}?^Executable: (?P<program>.*))(?=[\s\S]{0,600}?^Node: +(?P<host>\S+))",
        "the program {program} doesn't exist, or can't be executed, on the host {host}",
        "give its absolute path, which must exist on every host",
        "setup",
    ),
    Rule(
        "program-not-found",
        ("command not found", ": not found", "No such file or directory"),
        r"^(?:(?:/bin/)?(?:ba|da|z)?sh: (?:line )?(?:\d+: )?(?P<program>[\w./+-]+): (?:command not found|not found|"
        r"No such "
        r"file or directory)|env: [\u2018'](?P<name>[^\u2019']+)[\u2019']: No such file or directory)$",
        "the program {program}{name} isn't found on the host of {who}",
        "give its absolute path, which must exist on every host; a login without a terminal has a shorter PATH",
        "setup",
    ),
    Rule(
        "working-folder-missing",
        "working directory",
        r"(?:unable to change to|change to|unable to (?:find|access) the|Could not chdir to)[\s\S]{0,80}?working\s+"
        r"directory[\s\S]{0,300}?^ *(?:[Ww]orking directory|[Pp]ath|[Dd]irectory): +(?P<path>\S+)",
        "the working folder {path} doesn't exist on a host",
        "create it there, share it, or start the job in a folder that all hosts have",
        "setup",
    ),
    Rule(
        "controller-not-built",
        "has not been built",
        r"(?P<controller>Gloo|MPI) support has not been built",
        "this Horovod was built without {controller}",
        "hvdtrain horovod build --rebuild (with Open MPI's headers for MPI: Debian libopenmpi-dev), or the other "
        "controller",
        "setup",
    ),
    Rule(
        "parameter-twice",
        "listed multiple times",
        r"MCA param[\s\S]{0,120}?multiple times[\s\S]{0,120}?(?:Param|MCA param): +(?P<name>\S+)",
        "mpirun was given the parameter {name} twice, and horovodrun gives it already",
        "leave {name} out of --mpi-args; hvdtrain chooses Open MPI's components itself",
        "setup",
    ),
    Rule(
        "hostfile-format",
        ("IndexError: list index out of range", "Invalid host input"),
        r"(?:parse_host_files|parse_hosts)[\s\S]*(?:IndexError|ValueError): (?P<what>.*)|Invalid host "
        r"input(?P<rest>.*)",
        "horovodrun can't read the hostfile: it takes only lines of the form 'name slots=N'",
        "remove blank lines, comments and user@host from it; hvdtrain's --hostfile takes them all",
        "setup",
    ),
)

RDMA = (
    Rule(
        "locked-memory",
        ("ibv_reg_mr", "ibv_create_qp", "ibv_create_cq", "memlock", "locked memory", "register memory"),
        r"ibv_(?:reg_mr\w*|create_qp|create_cq)\b[^\n]*(?:Cannot allocate memory|errno=?\s*12|\b12\b)|set max locked "
        r"memory|"
        r"RLIMIT_MEMLOCK|OpenFabrics (?:subsystem )?[^\n]*register(?:able)? memory",
        "RDMA can't lock the memory that it needs",
        "ulimit -l unlimited on every host also for ssh logins (limits.conf: * - memlock unlimited); in a container "
        "--ulimit memlock=-1",
    ),
    Rule(
        "rdma-gid",
        "ibv_modify_qp",
        r"ibv_modify_qp failed with (?:error )?(?:\d+ )?(?P<why>Invalid argument|No such device|Network is "
        r"unreachable|No "
        r"data available)[^\n]*",
        "the RDMA devices of two hosts can't be connected ({why}): usually the wrong GID index or the wrong port for "
        "RoCE",
        "NCCL_IB_GID_INDEX to that of RoCE v2 (show_gids), and NCCL_IB_HCA to the devices that are cabled",
    ),
    Rule(
        "rdma-unreachable",
        ("ibv_modify_qp", "status=12", "error 12", "IBV_WC_RETRY_EXC_ERR"),
        r"ibv_modify_qp failed with (?:error )?(?:\d+ )?Connection timed out[^\n]*|"
        r"[Gg]ot completion (?:from peer (?P<peer>\S+) )?with (?:error|status=)\s?12\b[^\n]*|IBV_WC_RETRY_EXC_ERR",
        "an RDMA connection between two hosts gives no answer: a link is down, or these devices have no way to each "
        "other",
        "ibstat and ibping between the hosts of those devices; rail networks: NCCL_CROSS_NIC=0; otherwise "
        "NCCL_IB_HCA for "
        "those that work, NCCL_IB_TIMEOUT=22, or NCCL_IB_DISABLE=1 to see whether TCP works",
    ),
    Rule(
        "rdma-protection",
        ("local protection error", "status=4 ", "status=5 ", "error 4,", "error 5,"),
        r"local protection error|[Gg]ot completion [^\n]*with (?:error |status=)(?P<status>4|5|10)\b[^\n]*",
        "an RDMA transfer broke off with a protection or flush error: often GPU memory that its peer memory module no "
        "longer serves, or a peer that has just ended",
        "nvidia-peermem (or dma-buf) must be loaded and fit the driver: modprobe nvidia-peermem; NCCL_NET_GDR_LEVEL=0 "
        "shows whether it is that",
    ),
    Rule(
        "ucx-unavailable",
        "cannot be selected",
        r"PML (?P<component>\w+) cannot be selected",
        "Open MPI's {component} can't be used on this host: it has no device for it",
        "leave -mca pml {component} out (ob1 is right for TCP), or install UCX and the RDMA drivers there",
        "setup",
    ),
)

NETWORK = (
    Rule(
        "gloo-interface",
        "Unable to find address for",
        r"Unable to find address for: (?P<interface>\S+)",
        "the network interface {interface} doesn't exist, or has no address, on the host of {who}",
        "ip -br address there; HOROVOD_GLOO_IFACE (for hvdtrain: network.interfaces) must name one that exists on "
        "each host",
        "setup",
    ),
    Rule(
        "mpi-interface",
        ("TCP networks specified", "invalid value for btl_tcp_if", "if_include", "network interface"),
        r"(?:None of the TCP networks specified[\s\S]{0,120}?could be found:\s+Value given: (?P<interface>.*)|"
        r"invalid value for (?:btl|oob)_tcp_if_(?:in|ex)clude[\s\S]{0,200}?Value: +(?P<value>\S+))",
        "Open MPI doesn't find the network interface that it was told to use ({interface}{value})",
        "ip -br address on each host; give a name or a network (10.0.0.0/24) that all of them have",
        "setup",
        "Open MPI doesn't find the network interface that it was told to use",
    ),
    Rule(
        "horovodrun-interface",
        "No interface is found for address",
        r"No interface is found for address (?P<address>[\w.:]+)",
        "horovodrun finds none of the network interfaces that it was told to use",
        "ip -br address on each host; network.interfaces (horovodrun --network-interfaces) must name existing ones",
        "setup",
    ),
    Rule(
        "nccl-interface",
        ("no socket interface found", "NCCL_SOCKET_IFNAME interface", "is neither AF_INET"),
        r"Bootstrap : no socket interface found|no NCCL_SOCKET_IFNAME interface found|with family \d+ is neither "
        r"AF_INET",
        "NCCL finds no network interface: the one that NCCL_SOCKET_IFNAME names doesn't exist on the host of {who}",
        "ip -br address there, then NCCL_SOCKET_IFNAME to one that exists on each host (a prefix as eth, or =eth0 "
        "exactly)",
        "setup",
    ),
    Rule(
        "no-common-interface",
        ("Unable to find a set of common", "NoValidAddressesFound", "common interfaces"),
        r"Unable to find a set of common task-to-task communication interfaces|NoValidAddressesFound|"
        r"Unable to connect to the [\w ]+ on any of the addresses",
        "the hosts have no network interface of one name through which all reach each other",
        "network.interfaces in the job (or horovodrun --network-interfaces a,b) with those that are connected",
        "setup",
    ),
    Rule(
        "mpi-no-transport",
        "BTLs attempted: self",
        r"BTLs attempted: self$",
        "Open MPI has no way to send between the processes: the interface or the component that it was told to use "
        "isn't "
        "there",
        "leave -mca btl … out or name tcp,vader,self, and with btl_tcp_if_include an interface that exists on each "
        "host",
        "setup",
    ),
    Rule(
        "mpi-connect",
        ("failed to TCP connect to a peer", "unable to reach each other", "unable to complete a TCP connection"),
        r"failed to TCP connect to a peer MPI process[\s\S]{0,300}?connect\(\) to (?P<peer>[\d.:a-f]+) failed|"
        r"[Aa]t least one pair of MPI processes are unable to reach each other|"
        r"unable to complete a TCP connection[\s\S]{0,120}?[Ll]ocal host",
        "MPI processes can't reach each other over the network that Open MPI chose (docker0 or virbr0 on several "
        "hosts?)",
        "name the right network: mpirun -mca btl_tcp_if_include 10.0.0.0/24 -mca oob_tcp_if_include 10.0.0.0/24 "
        "(for hvdtrain: network.interfaces)",
        "lost_host",
    ),
    Rule(
        "slurm-pmi",
        ("PMI", "PMIx"),
        r"SLURM's? PMI support|OMPI was not built with SLURM's PMI|The application appears to have been direct "
        r"launched using "
        r"\"srun\"",
        "the program was started with srun, and this Open MPI has no support for that",
        "start it with mpirun or hvdtrain launch inside the allocation, or srun --mpi=pmix with an Open MPI built "
        "for it",
        "setup",
    ),
)
