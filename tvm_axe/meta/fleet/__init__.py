"""Measuring on other machines, which a tracker of upstream's RPC hands out.

Its parts:

    fleet         which machines a job is to measure on, and what it asks of them
    fingerprint   what a machine is, and in what it isn't what a job needs
    tracker       upstream's tracker, and what it says of a fleet
    probe, scale  what every machine times, and how that puts the times of several on one scale
    session       what a server does for a job, piece by piece, and what it says of it
    server        `tvm-axe worker`: offers this machine to a tracker
    plain         a session with one of upstream's own servers, which has a runtime and nothing of this package
    link          the process that holds a connection to a server, for a job
    member        a server as a job sees it
    items         what is to be done, and what becomes of it when its server is lost
    share         what a job may have of a tracker's servers, where several want them
    crew          a job's servers: who is asked for, does what, is let go, and why
    runner        the measurer over a crew that searches know
"""
